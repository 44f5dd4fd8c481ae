"""From a source string to segments of uint8 images. Imports base only, and no torch where a device may have none."""
