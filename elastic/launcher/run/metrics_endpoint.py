"""Ports at which the services of this machine serve their metrics."""

from __future__ import annotations

import socket

from elastic.config import JobConfig
from elastic.domain.errors import FieldError


def metrics_flag(config: JobConfig, number: int) -> list[str]:
    """Return the metrics flag of service `number` here: coordinators from 0, agents after them."""
    if config.metrics_port < 0:
        return []
    return ["--metrics-port", str(config.metrics_port and config.metrics_port + number)]


def first_agent(config: JobConfig) -> int:
    """Return the number of this machine's first agent, even if no coordinator runs here."""
    return config.coordinators if config.standalone else 1


def remote_agent_flag(config: JobConfig) -> list[str]:
    """Return the metrics flag of an agent on a cluster: any free port if its own is taken."""
    try:
        check_free(config, 0, 1)
    except FieldError:
        return ["--metrics-port", "0"]
    return metrics_flag(config, first_agent(config))


def check_free(config: JobConfig, coordinators: int, agents: int) -> None:
    """Check the metrics ports that this number of coordinators and agents will use here.

    Raises FieldError if a requested port is taken, or the address is not this machine's.
    """
    if config.metrics_port < 0:
        return
    host, base = config.metrics_host.strip("[]"), config.metrics_port
    after = first_agent(config)
    numbers = (*range(coordinators), *range(after, after + agents))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in [base + number for number in numbers] if base else [0]:
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            remedy = f"give a free address of this machine ({error.strerror})"
            raise FieldError("--metrics-port", f"{config.metrics_host}:{port}", remedy) from None
