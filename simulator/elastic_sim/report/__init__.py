"""HTML pages of replays, sweeps and traces.

`replay_page` and `trace_page` collect the values of their pages; `pages` fills in the templates
and `charts` draws. `assumptions` lists constants with their sources. A page is one file that loads
nothing. Only `pages` and `charts` may import jinja2 and plotly, which are optional. Start reading
at `replay_page.replay_page`.
"""
