"""`tlt-server fleet`: the command, the front's life, the replicas that Ray keeps."""
