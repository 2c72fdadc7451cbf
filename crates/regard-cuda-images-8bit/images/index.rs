// Written by `cargo xtask cuda build`. Do not edit.
Index {
    archives: &[
    ],
    images: &[
    ],
}
