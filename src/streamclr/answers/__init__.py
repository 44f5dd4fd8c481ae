"""Answers that leave the machine: chosen, kept on the disk, delivered to MQTT, webhooks and files. Needs no torch;
imports `records` and what is below it."""
