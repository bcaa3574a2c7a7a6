"""`braid prove`: a run shrunk to a few local ranks, and compared with one process in float64.

    shrink      a run of any size -> the same kinds, mesh and options at sizes that a laptop trains
    shorten     its layers -> the same without repetitions
    outcome     two steps, an evaluation and a checkpoint on any ranks, put together as whole tensors
    compare     how far two outcomes are apart, check by check
    sabotage    sums that are left out on purpose, to show that a comparison can fail
    proof       a small run in, its comparison out

The tests of the repository compare with the same code.
"""
