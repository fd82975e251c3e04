"""Kubernetes manifests of a job.

`render` fills in the manifests of deploy/kubernetes. `kustomize` reads bases and overlays, and
`controllers` turns StatefulSets into Jobs or a JobSet. No cluster is contacted, and `yaml` is
imported only here. Start reading in `render.py`.
"""
