"""Images, audio and video: files decoded, encoders loaded when first used, media in a prompt."""
