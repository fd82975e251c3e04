"""The data types that all other packages share.

`types` has plans, copies, recipes and the job's description; `ledger` has sets of micro-batches;
`state_layout` defines the bytes of a layer's state; `codec` converts these objects to JSON values
and back; `errors` has every exception. No module decides anything, does I/O, or imports another
package of this project. Start with `types`.
"""
