"""Where the job's state is kept, as the user gives it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.domain.errors import FieldError

SCHEME = "etcd://"
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Raises FieldError, naming the command line's flag, when it is wrong. Holds no secret, only names of files."""

    url: str = ""
    """"": an SQLite file in the run directory; etcd://HOST:PORT[,HOST:PORT...]: a cluster of etcd."""
    ca: str = ""
    """File of the certificates that etcd's own must come from; with it the connection is TLS."""
    cert: str = ""
    key: str = ""
    """Files of the certificate shown to etcd, and of its key."""
    user: str = ""
    password_file: str = ""
    """File whose content is the password of `user`."""

    def __post_init__(self) -> None:
        if self.url and not self.endpoints:
            raise FieldError(
                "--store", self.url, 'nothing, or etcd://HOST:PORT, several as "etcd://a:2379,b:2379"'
            )
        rest = (("--store-ca", self.ca), ("--store-cert", self.cert), ("--store-key", self.key),
                ("--store-user", self.user), ("--store-password-file", self.password_file))  # fmt: skip
        for flag, value in rest:
            if value and not self.url:
                raise FieldError(flag, value, "it belongs to --store etcd://HOST:PORT")
        for flag, value in rest[1:3]:
            if value and not (self.ca and self.cert and self.key):
                raise FieldError(flag, value, "--store-ca, --store-cert and --store-key go together")
        for flag, value in rest[3:]:
            if value and not (self.user and self.password_file):
                raise FieldError(flag, value, "--store-user and --store-password-file go together")

    @property
    def shared(self) -> bool:
        """Several machines can reach it."""
        return bool(self.url)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of every member given; () if there is none, or one is no address."""
        texts = self.url.removeprefix(SCHEME).split(",") if self.url.startswith(SCHEME) else []
        found = [_ENDPOINT.fullmatch(text.strip()) for text in texts]
        good = [match[0] for match in found if match is not None and 1 <= int(match[2]) <= 65535]
        return tuple(dict.fromkeys(good)) if len(good) == len(texts) else ()
