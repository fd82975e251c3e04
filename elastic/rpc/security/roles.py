"""Roles of those who call a job's coordinator, and the tokens of the roles.

The token of a role is computed from the join token, so a job keeps no second secret, and nobody can
compute the join token from it. The token names its role: a client knows what it may ask for.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum

READS, CHANGES = ("status", "nodes", "peers", "plan"), ("drain",)
"""Calls that change nothing, and calls that change the job."""

BY = "by"
"""Field that the coordinator's port adds to a call that changes the job: who calls."""


class Role(StrEnum):
    """What the holder of a token may do."""

    MEMBER = "member"
    """Everything: it knows the join token, can run a node and keeps copies."""
    OPERATOR = "operator"
    """Read, and drain nodes."""
    VIEWER = "viewer"
    """Read only."""

    def may(self, kind: str) -> bool:
        """Return whether a caller of this role may make a call of this kind."""
        return self is not Role.VIEWER or kind in READS


LESSER = (Role.OPERATOR, Role.VIEWER)
"""Roles with a token of their own."""
_TOKEN = re.compile(rf"({'|'.join(LESSER)})-[0-9a-f]{{64}}")


def token_of(role: Role, join_token: str) -> str:
    """Return the token of a role in the job with this join token; "": the job has no token."""
    if role is Role.MEMBER or not join_token:
        return join_token
    text = hmac.new(join_token.encode(), f"elastic role {role}".encode(), hashlib.sha256)
    return f"{role}-{text.hexdigest()}"


def role_of(token: str) -> Role:
    """Return the role that a token names; MEMBER: it is a join token."""
    found = _TOKEN.fullmatch(token)
    return Role(found[1]) if found else Role.MEMBER
