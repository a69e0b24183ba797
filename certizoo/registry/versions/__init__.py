"""Publish versions with their certificates, bind their files by digests, and choose the champion."""
