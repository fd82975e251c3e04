"""Messages between processes, and the rules that both ends share.

`messages` and `health_report` define the messages; `timeouts`, `election` and `compression` are
pure rules; `fault_spec`, `notice_source` and `store_spec` parse values of the command line;
`device_errors` classifies error texts. No module opens a connection or a file: `elastic.rpc` sends
the messages. Start with `messages`.
"""
