"""Planning: for every node what happens to it, and the reason in words. Decides; edits nothing."""
