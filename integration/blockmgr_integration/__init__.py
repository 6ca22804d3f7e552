"""Where the block manager meets other people's libraries: models, schedulers, servers, benchmarks.

Every module here may import `blockmgr` and `blockmgr_kernels`; neither of those imports this package.
Third-party libraries are optional extras and are imported where they are used.
"""
