"""Location of the store that keeps the job's state, from the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.domain.errors import FieldError

SCHEME = "etcd://"
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Location of the store. The fields hold names of files, never a secret.

    Raises FieldError, which names the flag, if a value is wrong.
    """

    url: str = ""
    """etcd://HOST:PORT[,HOST:PORT...] for an etcd cluster; "": SQLite in the run directory."""
    ca: str = ""
    """File of etcd's certificate authority; "": the connection does not use TLS."""
    cert: str = ""
    key: str = ""
    """Files of the client certificate for etcd (`cert`) and of its key (`key`)."""
    user: str = ""
    password_file: str = ""
    """File that contains the password of `user`."""

    def __post_init__(self) -> None:
        if self.url and not self.endpoints:
            remedy = 'nothing, or etcd://HOST:PORT, several as "etcd://a:2379,b:2379"'
            raise FieldError("--store", self.url, remedy)
        certificate = {"--store-cert": self.cert, "--store-key": self.key}
        login = {"--store-user": self.user, "--store-password-file": self.password_file}
        for flag, value in {"--store-ca": self.ca, **certificate, **login}.items():
            if value and not self.url:
                raise FieldError(flag, value, "it belongs to --store etcd://HOST:PORT")
        for flag, value in certificate.items():
            if value and not (self.ca and self.cert and self.key):
                raise FieldError(
                    flag, value, "--store-ca, --store-cert and --store-key go together"
                )
        for flag, value in login.items():
            if value and not (self.user and self.password_file):
                raise FieldError(flag, value, "--store-user and --store-password-file go together")

    @property
    def shared(self) -> bool:
        """Whether several machines can reach the store."""
        return bool(self.url)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of every etcd server; () if the URL has none or a wrong one."""
        texts = self.url.removeprefix(SCHEME).split(",") if self.url.startswith(SCHEME) else []
        found = [_ENDPOINT.fullmatch(text.strip()) for text in texts]
        good = [match[0] for match in found if match and 1 <= int(match[2]) <= 65535]
        return tuple(dict.fromkeys(good)) if len(good) == len(texts) else ()
