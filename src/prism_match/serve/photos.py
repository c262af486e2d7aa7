"""Photos from bytes that someone sent: looked at before they are decoded, and never anything else opened."""

from __future__ import annotations

import io

from prism_match.errors import UserError
from prism_match.images import BOMB, SMALLEST, Image, claims_too_much, decode
from prism_match.serve.refusal import Refused, complain

# Pillow knows many more, some of which start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")


def read_photo(data: bytes, name: str, max_pixels: int) -> Image:
    """name: of the field, for errors; what the client calls its file is nobody's business."""
    import PIL.Image

    if not data:
        raise Refused(415, f"{name}: the file is empty")
    try:
        with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise Refused(
                    413,
                    f"{name}: {width}x{height} is {width * height / 1e6:.1f} megapixels; "
                    f"at most {max_pixels / 1e6:g} are allowed",
                )
            if claims_too_much(opened, len(data)):
                raise Refused(413, f"{name}: too many pixels for so small a file; {BOMB}")
            if min(width, height) < SMALLEST:
                raise Refused(
                    422, f"{name}: too small ({width}x{height}); at least {SMALLEST} pixels a side are needed"
                )
            return decode(opened, name)
    except PIL.Image.DecompressionBombError as error:
        raise Refused(413, f"{name}: more than the {max_pixels / 1e6:g} megapixels allowed") from error
    except PIL.UnidentifiedImageError as error:
        raise Refused(415, f"{name}: not an image of a known format ({', '.join(FORMATS)})") from error
    except UserError as error:
        raise Refused(415, str(error)) from error
    except Refused:
        raise
    except Exception as error:
        # Pillow reports broken files in many ways; by some of them the fault may be ours.
        if not isinstance(error, (OSError, SyntaxError, ValueError, EOFError)):
            complain("a photo cannot be decoded", error)
        raise Refused(415, f"{name}: damaged image") from error
