"""Values that share a buffer as large as the largest of them: Caffe2's memonger, made right.

For back ends without offsets, and to compare with: `arena` packs buffers of any size side by side, which needs less.
"""
