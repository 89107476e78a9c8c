"""rollstream: reinforcement-learning post-training as a Ray-native pipeline of composable stages."""
