"""What operators and messages cost: measured curves, or data sheets with a model of the links."""
