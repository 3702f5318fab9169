"""From a config to a model: layer groups, scan, remat, and the handle that the rest of maxlite sees."""
