"""Other engines, each in a virtual environment and a process of its own, with one protocol.

    python -m bench.peers list                      engines, and versions of those that are installed
    python -m bench.peers install openvino vllm     make virtual environments (.peers/NAME)

``--place`` (or ``AIOINFER_PEERS``) puts environments and models elsewhere. ``python -m bench cpu`` measures.
"""
