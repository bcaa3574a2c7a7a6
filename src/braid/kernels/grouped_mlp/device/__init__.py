"""The experts' MLP in Triton, for Hopper: kernels, and functions that launch them.

Rows are sorted by expert, experts may have any number of them, none included. Where each expert's rows end is
known to the device alone: nothing here waits for it. All of it needs Triton; whoever imports this has looked
for it."""
