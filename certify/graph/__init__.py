"""Models of any class: their computation is captured as a graph and rebuilt from modules that have rules."""
