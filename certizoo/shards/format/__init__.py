"""The parts of a set of shards: its settings, manifest, members and tokeniser."""
