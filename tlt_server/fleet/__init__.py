"""Several servers behind one URL: control calls as transactions over all, members admitted by their weights alone."""
