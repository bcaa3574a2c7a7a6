"""Mixture of experts, the layer `E`.

    router       logits ─► scores ─► selection (top-k, groups, bias; sinkhorn) ─► capacity ─► Routing
    permute      orders of rows: tokens to experts and back, within one process
    dispatch_plan     how slots reach the ranks of their experts, and what a dispatcher is
    token_dispatcher  picks one, and says why: all_to_all, all_gather, deep_ep
    experts      the routed experts; layer adds the latent projections and the shared expert
    balance      losses and counts of a Routing, the selection bias that follows counts, statistics of the load
    replay       routing decisions of one run, for another to repeat

Nothing here remembers a micro-batch. `tokens` is what routing may know of one.
"""
