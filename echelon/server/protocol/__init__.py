"""What client, servers and controller share: frames, the shard map, authentication, the event loop."""
