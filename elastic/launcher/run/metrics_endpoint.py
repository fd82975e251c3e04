"""Where the services of this machine serve their metrics."""

from __future__ import annotations

import socket

from elastic.config import JobConfig
from elastic.domain.errors import FieldError


def metrics_flag(config: JobConfig, number: int) -> list[str]:
    """Words for service `number` of this machine: from 0 on coordinators, from `first_agent` on agents."""
    if config.metrics_port < 0:
        return []
    return ["--metrics-port", str(config.metrics_port and config.metrics_port + number)]


def first_agent(config: JobConfig) -> int:
    """Number of this machine's first agent. It is the same whether a coordinator runs here or not."""
    return config.coordinators if config.standalone else 1


def hosted_flag(config: JobConfig) -> list[str]:
    """The same for an agent that a cluster put on this machine: where another one has its port, any free one."""
    try:
        check_free(config, 0, 1)
    except FieldError:
        return ["--metrics-port", "0"]
    return metrics_flag(config, first_agent(config))


def check_free(config: JobConfig, coordinators: int, agents: int) -> None:
    """Raise FieldError if a port that was asked for is taken, or the address is none of this machine.

    `coordinators` and `agents`: how many of them this machine is to run.
    """
    if config.metrics_port < 0:
        return
    host, first = config.metrics_host.strip("[]"), config.metrics_port
    after = first_agent(config)
    numbers = (*range(coordinators), *range(after, after + agents))
    ports = [first + number for number in numbers] if first else [0]
    for port in ports:
        try:
            socket.create_server((host, port), family=_family(host)).close()
        except OSError as error:
            where = f"{config.metrics_host}:{port}"
            raise FieldError(
                "--metrics-port", where, f"an address of this machine that is free ({error.strerror})"
            ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
