"""System: the one door to what differs between operating systems.

Every other room asks here for locks, memory, cores, limits and the like; no other one looks at
``sys.platform``, at ``/proc`` or at functions that only some systems have. Where a system has no answer it is
None, or nothing is done: what is asked for here makes a process faster or more careful, not correct.
"""
