"""Version of the package. It stands here so that no file imports the top-level package."""

VERSION = "0.1.0"
