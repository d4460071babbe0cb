"""Other engines, each in a virtual environment and a process of its own, behind one protocol.

    python -m bench.peers list                      what there is, and what is installed
    python -m bench.peers install openvino vllm     make virtual environments (.peers/NAME)
    python -m bench.peers prepare openvino          make the checkpoint and convert it

``--place`` (or ``AIOINFER_PEERS``) puts environments and models elsewhere. ``python -m bench cpu`` measures.
"""
