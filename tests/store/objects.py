"""A server on this machine that speaks S3, for checkpoints in an object store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

import boto3
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextlib.contextmanager
def server_away() -> Iterator[None]:
    """What is opened in the block finds no server."""
    with patch.dict(os.environ, AWS_ENDPOINT_URL="http://127.0.0.1:9"):
        s3fs.S3FileSystem.clear_instance_cache()
        yield
    s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, str]]]:
    """Serve S3 until the block ends; give the URL of a bucket, and the environment variables with
    which processes find the server. They are set in this process, too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    try:
        with patch.dict(os.environ, found):
            s3fs.S3FileSystem.clear_instance_cache()  # it may know a former server
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}", found
    finally:
        server.stop()
