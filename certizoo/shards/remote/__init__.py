"""Shards elsewhere: object stores, web servers and commands, a cache, and the check against the manifest."""
