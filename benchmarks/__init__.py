"""Benchmarks behind every claim about speed, each with its command, hardware and results."""
