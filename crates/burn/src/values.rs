//! Tensors as bytes, in and out.

use std::collections::HashMap;
use std::slice::Iter;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType as BurnDType, Int, Tensor, TensorData};
use phalanx_ddp::{Error, Result, Tensor as Place};
use phalanx_pg::DType;

use crate::inventory::Inventory;

/// The type of elements, as process groups call it.
pub(crate) fn dtype_of(dtype: BurnDType) -> Result<DType> {
    Ok(match dtype {
        BurnDType::F64 => DType::F64,
        BurnDType::F32 => DType::F32,
        BurnDType::F16 => DType::F16,
        BurnDType::BF16 => DType::BF16,
        BurnDType::I64 => DType::I64,
        BurnDType::I32 => DType::I32,
        BurnDType::I16 => DType::I16,
        BurnDType::I8 => DType::I8,
        BurnDType::U8 => DType::U8,
        BurnDType::Bool(_) if dtype.size() == 1 => DType::Bool,
        other => {
            return Err(Error::frontend(format!(
                "tensors of {other:?} cannot be sent to other ranks"
            )));
        }
    })
}

/// Copies tensors of a module out, in one walk.
pub(crate) fn read<M: Module>(
    module: &M,
    inventory: &Inventory,
    wanted: &mut [(Place, &mut [u8])],
) -> Result<()> {
    let by_place = wanted.iter_mut();
    let mut reader = Reader {
        floats: inventory.floats.iter(),
        others: inventory.others.iter(),
        wanted: by_place.map(|(place, out)| (*place, &mut **out)).collect(),
        result: Ok(()),
    };
    module.visit(&mut reader);
    reader.result
}

struct Reader<'a> {
    floats: Iter<'a, Place>,
    others: Iter<'a, Place>,
    wanted: HashMap<Place, &'a mut [u8]>,
    result: Result<()>,
}

impl Reader<'_> {
    fn read(&mut self, place: Option<&Place>, data: impl FnOnce() -> TensorData) {
        let Some(out) = place.and_then(|place| self.wanted.remove(place)) else {
            return;
        };
        let data = data();
        match data.as_bytes().len() == out.len() {
            true => out.copy_from_slice(data.as_bytes()),
            false => self.result = Err(changed()),
        }
    }
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.floats.next();
        self.read(place, || param.base().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let place = self.others.next();
        self.read(place, || param.base().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let place = self.others.next();
        self.read(place, || param.base().into_data());
    }
}

/// A module with other values in some of its tensors, after one walk; what did not fit, if anything.
pub(crate) fn write<M: Module>(
    module: M,
    inventory: &Inventory,
    values: &[(Place, &[u8])],
) -> (M, Result<()>) {
    let mut writer = Writer {
        floats: inventory.floats.iter(),
        others: inventory.others.iter(),
        values: values.iter().copied().collect(),
        result: Ok(()),
    };
    let module = module.map(&mut writer);
    (module, writer.result)
}

struct Writer<'a> {
    floats: Iter<'a, Place>,
    others: Iter<'a, Place>,
    values: HashMap<Place, &'a [u8]>,
    result: Result<()>,
}

impl Writer<'_> {
    /// The tensor, with other values if there are any for it.
    fn write<const D: usize, K: Basic>(
        &mut self,
        place: Option<&Place>,
        old: Tensor<D, K>,
    ) -> Option<Tensor<D, K>> {
        // A tensor that occurs twice is written twice.
        let bytes = self.values.get(place?)?.to_vec();
        let (shape, dtype) = (old.shape(), old.dtype());
        match bytes.len() == shape.num_elements() * dtype.size() {
            true => {
                let data = TensorData::from_bytes_vec(bytes, shape, dtype);
                Some(Tensor::from_data(data, (&old.device(), dtype)))
            }
            false => {
                self.result = Err(changed());
                None
            }
        }
    }
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (place, old) = (self.floats.next(), param.base());
        match self.write(place, old.clone()) {
            Some(new) => param.map(|_| new.set_require_grad(old.is_require_grad())),
            None => param,
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let place = self.others.next();
        match self.write(place, param.base()) {
            Some(new) => param.map(|_| new),
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let place = self.others.next();
        match self.write(place, param.base()) {
            Some(new) => param.map(|_| new),
            None => param,
        }
    }
}

/// What a model says that has other tensors than the one that `Ddp` was made with.
pub(crate) fn changed() -> Error {
    Error::frontend("the model has other tensors than when Ddp was made; make a new Ddp")
}
