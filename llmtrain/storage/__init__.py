"""Files that survive anything: atomic writes, manifests, locks, journals, errors. No torch."""
