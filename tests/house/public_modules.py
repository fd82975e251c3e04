"""Import contract: a package's private modules are imported by the package itself only."""

from __future__ import annotations

from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PublicModulesContract(Contract):
    """Holds if modules outside `packages` and other packages import only `public_modules` of each.

    All other modules of a package are private. A public module that nobody outside its package
    imports breaks the contract, too, so that the list stays short.
    """

    packages = fields.ListField(subfield=fields.StringField())
    public_modules = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        public = cast(set[str], self.public_modules)
        imported = {
            (importer, module)
            for package in cast(list[str], self.packages)
            for module in graph.find_descendants(package)
            for importer in graph.find_modules_that_directly_import(module)
            if not importer.startswith(f"{package}.")
        }
        private = sorted(pair for pair in imported if pair[1] not in public)
        unused = sorted(public - {module for _, module in imported})
        return ContractCheck(
            kept=not private and not unused, metadata={"private": private, "unused": unused}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, module in check.metadata["private"]:
            output.print_error(f"{importer} imports {module}, which is private to its package")
        for module in check.metadata["unused"]:
            output.print_error(f"{module} is listed as public, but only its own package imports it")
