"""Replicas that a Ray cluster places.

This process never imports Ray: that sets signal handlers, starts threads, and ends its process when the
cluster's head has been gone for a minute. A child does, the keeper::

    this process                          keeper (a driver of Ray)         a node of the cluster
    RayReplica ── RayCluster ── JSON ──► places and ends     ── Ray ──► ReplicaActor: engine, agent
        └───────────── frames on TCP, as with any other replica ──────────────────┘
        └─ or on a Unix socket ────────► passes bytes on ──────── Ray ────────────┘
"""
