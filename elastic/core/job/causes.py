"""Kinds of causes of an epoch change, for statistics: what the texts of `elastic.core.job.state.Change.cause` begin with."""

from __future__ import annotations

import re

CAUSES = (
    "start", "lost", "worker", "hang", "contact", "drain", "notice", "join", "slow", "backup", "resume", "other",
)  # fmt: skip
"""start of the job | a node is lost | a node's workers went down | they hung | workers lost contact | a node leaves
with notice | the notice ran out | nodes joined | nodes turned slow or well again | another pair of backup schemes |
nodes came to a paused job | anything else."""
_FORMS = (
    ("start", r"start$"),
    ("contact", r"contact lost"),
    ("lost", r"\S+ lost"),
    ("hang", r"\S+: hang"),
    ("worker", r"\S+: "),
    ("drain", r"drain "),
    ("notice", r"notice of "),
    ("join", r"join "),
    ("slow", r"\S+ (computes|is as fast)"),
    ("backup", r"backup "),
    ("resume", r"nodes came"),
)


def kind_of(cause: str) -> str:
    """One of CAUSES. Of several causes, one after the other, the first counts."""
    return next((kind for kind, form in _FORMS if re.match(form, cause)), "other")
