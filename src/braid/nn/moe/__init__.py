"""Mixture of experts (MoE), the layer `E`.

    router            logits ─► scores ─► top-k (group-limited, biased, sinkhorn) ─► capacity ─► Routing
    permute           permutation of tokens into rows sorted by expert and back, within one rank
    dispatch_plan     where slots go under expert parallelism; the protocol of dispatchers
    token_dispatcher  chooses a dispatcher: all_to_all, all_gather or deep_ep
    experts           the routed experts (grouped GEMM); `layer` adds latent projections and the shared expert
    balance           auxiliary losses, expert counts, the aux-loss-free selection bias, load statistics
    replay            recorded routing decisions, to be repeated by another run

All modules are stateless. `token_ids.Tokens` is what routing knows about the tokens of a micro-batch.
"""
