"""The folders of the product."""

# folder -> the project's folders that it may import besides itself and `certizoo`
FOLDERS: dict[str, set[str]] = {
    "certizoo": set(),
    "zoo": set(),
    "certify": {"zoo"},
    "trainers": {"zoo", "certify"},
    "tuning": {"zoo", "certify", "trainers"},
}
