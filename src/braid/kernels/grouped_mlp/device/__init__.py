"""The kernels of the fused grouped MLP, for Hopper, and the functions that launch them.

    gemm, gemm_warp_specialised                  fc1, fc2, dgrad2, dgrad1
    wgrad, wgrad_cuda, wgrad_warp_specialised    wgrad1, wgrad2

`gemm` and `wgrad` are plain Triton: they take every dtype, activation and bias, and the interpreter can run
them on a CPU. The others are faster and take less: bfloat16 operands, no bias, SwiGLU.

Rows are sorted by expert, and an expert may have any number of them, none included. Only the device knows where
each expert's rows end: nothing here waits for it. All of it imports Triton; the caller has checked that it is
installed.
"""
