"""Device functions shared by Triton kernels. Importing this package requires Triton."""
