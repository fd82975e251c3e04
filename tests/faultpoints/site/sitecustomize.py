"""Records or injects fault points in the processes of a real job.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
variable FAULT_POINTS has the settings as JSON: folders, record, target, fault, claim.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

STOPPED_S = 2


def role_of(argv, environment):
    """Return the role of this process; "": it has no points."""
    for module, prefix in (("agent", "agent"), ("coordinator", "coordinator")):
        if f"elastic.{module}.service" in argv:
            node = argv[argv.index("--node") + 1] if "--node" in argv else ""
            return f"{prefix}-{node}".rstrip("-")
    if environment.get("ELASTIC_NODE") and "LOCAL_RANK" in environment:
        return f"worker-{environment['ELASTIC_NODE']}"
    return ""


class AfterStore(importlib.abc.MetaPathFinder):
    """Wraps the store's writes when its module has been imported."""

    def __init__(self, injector, install):
        self.injector, self.install = injector, install

    def find_spec(self, name, path, target=None):
        if name != "elastic.store.sqlite":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def load(module):
            run(module)
            self.install(self.injector, module.SqliteStore, module.StoreUnavailable)

        spec.loader.exec_module = load
        return spec


def begin(settings):
    role = role_of(sys.orig_argv, os.environ)
    if not role:
        return
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    try:
        import injection
    finally:
        del sys.path[0]

    def claim(point):
        try:
            os.close(os.open(settings["claim"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def stopping():
        command = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
        os.posix_spawn("/bin/sh", ["sh", "-c", command], {"PATH": os.environ["PATH"]}, setsid=True)

    target = settings.get("target")
    injector = injection.Injector(
        role,
        record=settings.get("record", ""),
        target=injection.parse_point(target) if target else None,
        fault=settings.get("fault", ""),
        claim=claim,
        stopping=stopping,
    )
    injection.install(injector, tuple(settings["folders"]))
    sys.meta_path.insert(0, AfterStore(injector, injection.install_store))


if "FAULT_POINTS" in os.environ:
    begin(json.loads(os.environ["FAULT_POINTS"]))
