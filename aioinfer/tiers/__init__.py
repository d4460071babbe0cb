"""Tiers: pages of KV outside the device, under names made of their content.

``store`` says what a store of pages is; ``memory``, ``directory`` and ``archive`` are those that there are:
in this process, in files that processes share, and in one file that is written once.
"""
