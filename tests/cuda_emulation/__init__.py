r"""A CUDA device that is not there, for a torch that was built for one.

Where no GPU is to hand, what runs on CUDA is tested on the CPU with stand-ins for torch.cuda (``fake_cuda``).
Here torch is the real one: its allocator, streams, events, graphs, pinned memory and Triton's launcher all
run, down to the CUDA runtime they call, and only that is replaced by libraries that are preloaded:

    aioinfer, torch, Triton          as they are on a GPU
    ─────────────────────────────────────────────────────────────────────────
    state.cpp ...  libcudart.so      memory of the host, streams, events, capture; a clock
    driver.cpp     libcuda.so        what Triton asks of the driver
    blas.cpp       (libcublas)       products of matrices, as long as they would take

Left at that nothing is computed: kernels are compiled for Hopper and launched with their real grids, take the
time they are said to take, and leave memory as it is. That is enough for everything that must not fail, wait
or be forbidden in a capture, and for the host's own time::

    python -m tests.cuda_emulation -- python -m bench gpu --rehearse --device cuda

With ``--compute`` the work of torch's operations and of our kernels is done by the CPU (:mod:`.compute`),
when the streams come to it, so that results can be compared. When that is, is up to the device. ``--order
early`` computes at once and copies to the host as late as events permit; ``--order late`` does everything as
late as somebody waits for it. What is read, overwritten or given back without waiting for the right event is
wrong in one of them::

    python -m tests.cuda_emulation --compute --order late -- \
        python -m pytest -m gpu tests/execution/test_cuda_steps.py

It needs Linux, a C++ compiler and a torch for CUDA 13, which is what the package index has for Linux.
Whether work is done, and done in time, is looked at before a command with ``--compute`` (``check.py``), whose
times mean nothing. It says nothing of what a GPU computes, of races within a kernel, nor of speed on a
device.
"""
