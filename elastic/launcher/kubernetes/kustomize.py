"""The part of kustomize that deploy/kubernetes needs, so that jobs are rendered without kubectl.

`build` reads a folder's kustomization.yaml: `resources` (files and folders), `labels` with
selectors, and `patches` that are strategic merges. Other fields are errors.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from elastic.domain.errors import FieldError, needs_extra

with needs_extra("kubernetes", "`elastic kubernetes`"):
    import yaml

Object = dict[str, Any]
FILE = "kustomization.yaml"
_KNOWN = {"apiVersion", "kind", "resources", "labels", "patches"}
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
    "volumeClaimTemplates": "",
}
"""Lists that are merged by this key of their elements; other lists, and "", are replaced."""


def build(folder: Path) -> list[Object]:
    """Return the objects of a kustomization. Raises FieldError for unknown fields."""
    path = folder / FILE
    (spec,) = parsed(path.read_text())
    unknown = sorted(set(spec) - _KNOWN)
    if unknown:
        raise FieldError(str(path), unknown[0], f"one of {', '.join(sorted(_KNOWN))}")
    objects: list[Object] = []
    for name in spec.get("resources", ()):
        target = folder / name
        objects += build(target) if target.is_dir() else load(target)
    for entry in spec.get("patches", ()):
        if set(entry) != {"path"}:
            raise FieldError(f"{path} patches", sorted(entry), "only `path`, of a strategic merge")
        for patch in load(folder / entry["path"]):
            _patch(objects, patch, folder / entry["path"])
    for entry in spec.get("labels", ()):
        if set(entry) != {"pairs", "includeSelectors"} or entry["includeSelectors"] is not True:
            raise FieldError(f"{path} labels", sorted(entry), "pairs, with includeSelectors: true")
        for item in objects:
            label(item, entry["pairs"])
    return objects


def load(path: Path) -> list[Object]:
    """Return all objects of a YAML file."""
    return parsed(path.read_text())


def parsed(text: str) -> list[Object]:
    """Return all objects of a YAML text. The parser in C is faster, where it is installed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [item for item in yaml.load_all(text, Loader=loader) if item is not None]


def name_of(item: Object) -> tuple[str, str]:
    """Return (kind, name) of an object."""
    return str(item["kind"]), str(item["metadata"]["name"])


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """Return the strategic merge of `patch` into `base`; both are values of the key `field`.

    Objects are merged by key, where null deletes an entry, and the lists of `_KEYS` by element. All
    other values are replaced.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = (
                    merge(merged[key], value, key) if key in merged else copy.deepcopy(value)
                )
        return merged
    by = _KEYS.get(field, "")
    if by and isinstance(base, list) and isinstance(patch, list):
        changes = {item[by]: item for item in patch}
        kept = [
            merge(item, changes.pop(item[by])) if item[by] in changes else item for item in base
        ]
        return kept + copy.deepcopy(list(changes.values()))
    return copy.deepcopy(patch)


def label(item: Object, pairs: dict[str, str]) -> None:
    """Add labels to an object, to its pods and claims, and to selectors of our pods."""
    spec = item.get("spec", {})
    pods = [spec["template"]] if "template" in spec else []
    if job := spec.get("jobTemplate"):
        pods = [job, job["spec"]["template"]]
    for labelled in (item, *pods, *spec.get("volumeClaimTemplates", ())):
        metadata = labelled.setdefault("metadata", {})
        metadata["labels"] = {**metadata.get("labels", {}), **pairs}
    if item["kind"] == "Service":
        spec["selector"] = {**spec["selector"], **pairs}
    _label_selectors(spec, pairs)


def _label_selectors(value: Any, pairs: dict[str, str]) -> None:
    if isinstance(value, list):
        for entry in value:
            _label_selectors(entry, pairs)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key in ("selector", "podSelector", "labelSelector") and "matchLabels" in entry:
                entry["matchLabels"] = {**entry["matchLabels"], **pairs}
            elif key != "namespaceSelector":
                _label_selectors(entry, pairs)


def _patch(objects: list[Object], patch: Object, source: Path) -> None:
    found = [i for i, item in enumerate(objects) if name_of(item) == name_of(patch)]
    if len(found) != 1:
        raise FieldError(
            str(source), " ".join(name_of(patch)), "the kind and name of one of the resources"
        )
    objects[found[0]] = merge(objects[found[0]], patch)
