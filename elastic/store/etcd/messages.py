"""Makes `import etcd3` work beside a present protobuf.

The message modules that etcd3 0.12 ships were generated for protobuf 3 and cannot be imported by later ones. The
descriptors in them are as good as ever: they are read out of the files, without running them, and the modules are
built from them by protobuf's own builder, in a descriptor pool of their own. Import this module before `etcd3`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

PACKAGE = "etcd3.etcdrpc"
MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""In the order in which they need each other."""


def install() -> None:
    """Put the three modules where etcd3 looks for them. Raises ImportError when etcd3 is not installed. Idempotent."""
    found = importlib.util.find_spec("etcd3")
    if found is None or found.origin is None:
        raise ImportError("etcd3 is not installed")
    pool = descriptor_pool.DescriptorPool()
    for name in MODULES:
        full = f"{PACKAGE}.{name}"
        if full not in sys.modules:
            source = Path(found.origin).parent / "etcdrpc" / f"{name}.py"
            sys.modules[full] = _built(full, pool.AddSerializedFile(_serialized(source)))


def _built(name: str, file: object) -> ModuleType:
    module = ModuleType(name)
    names = module.__dict__
    names["DESCRIPTOR"] = file
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, name, names)
    return module


def _serialized(source: Path) -> bytes:
    """The argument of `serialized_pb=_b('...')` in a generated module."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            (text,) = node.value.args
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                return text.value.encode("latin1")
    raise ImportError(f"{source} holds no descriptor: another version of etcd3 than 0.12?")


install()
