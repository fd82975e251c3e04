"""The shared nouns of the system, below all other packages.

`types` has plans, copies, recipes and the job's description; `ledger` has sets of micro-batches;
`state_layout` says how a layer's state lies in bytes; `codec` turns these objects into JSON values
and back; `errors` has every exception. Nothing here decides anything, does I/O, or imports another
package of this project. Start with `types`.
"""
