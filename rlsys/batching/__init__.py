"""From a batch to packs: mini-batches of whole groups, and sequences laid end to end."""
