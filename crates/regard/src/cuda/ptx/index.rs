// Written by `cargo xtask cuda build`. Do not edit.
&[
    Shipped {
        name: "ceiling",
        architecture: "compute_80",
        ptx_bytes: 6080,
        deflated: include_bytes!("ceiling.ptx.z"),
    },
]
