"""The config dataclasses: the single source of keyword arguments, flags, environment variables and YAML keys.

``EngineConfig(max_running_requests=8)``, ``--max-running-requests 8``, ``AIOINFER_MAX_RUNNING_REQUESTS=8``
and ``max_running_requests: 8`` in a file set the same field. Flags take precedence over the environment, the
environment over the file, the file over the defaults below. A field's metadata holds its group, its help text
and its bounds.
"""

from aioinfer.config.engine import PAGE_SIZE, SPECULATION, EngineConfig, given, policy_names
from aioinfer.config.options import GROUPS
from aioinfer.config.replica import ReplicaConfig
from aioinfer.config.server import ServerConfig, given_server, is_loopback
from aioinfer.config.values import load_settings, parse_setting, value_names

__all__ = [
    "GROUPS",
    "PAGE_SIZE",
    "SPECULATION",
    "EngineConfig",
    "ReplicaConfig",
    "ServerConfig",
    "given",
    "given_server",
    "is_loopback",
    "load_settings",
    "parse_setting",
    "policy_names",
    "value_names",
]
