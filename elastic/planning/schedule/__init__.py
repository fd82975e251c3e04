"""Pipeline schedules as action lists: 1F1B, interleaved 1F1B and zero-bubble.

`schedule` makes the lists, and `timeline` simulates them. `interleave` divides the layers into
several stages per unit, and `microbatch_split` divides micro-batches over pipelines.
`partial_schedule` runs micro-batches through some layers only, and `reduction_rounds` defines the
rounds of scheme `reduce`. Nothing here knows devices. Start with `schedule`.
"""
