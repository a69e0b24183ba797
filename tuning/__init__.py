"""Searches: spaces, trials and their display.

Importing it is cheap. Ray is imported by driver.py and what it uses of nodes.py, memory.py and gauges.py.
"""
