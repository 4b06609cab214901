"""Benchmarks of ppo_ops beside real packages: ``python -m benchmarks --help``.

__main__         the command line: sections, progress, JSON
inputs           a cell (rows, vocabulary, dtype, option) and its tensors
providers        this library, plain torch and the peers, each behind one signature
gate             correctness against float64; no provider is timed that fails it
timing           interleaved rounds, medians, the limits of the machine
sections         what is measured in one process
tensor_parallel  what is measured with the vocabulary split over processes
memory           peak memory, each number from a fresh process
bounds           the numbers that this project promises, pass or fail
report, plots    markdown tables and PNG files from the JSON

gpu              another command line, for a GPU that is lent for minutes: ``python -m benchmarks.gpu``
gpu_*            its cells, peers, tile sizes, tables
triton_*         what the Triton kernels compile to, without a GPU: ``python -m benchmarks.triton_compile``
"""
